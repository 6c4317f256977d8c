"""What makes a run of the parts: command, configuration, processes, REST, reports."""
