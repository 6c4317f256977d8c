"""Functions of the user's, named in a configuration as package.module:function."""

from __future__ import annotations

import importlib
from typing import Any

from leeway.replay.errors import ConfigurationError


def import_named(path: str, key: str) -> Any:
    """What `path` names. Raises ConfigurationError, naming the configuration's `key`, when it
    cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _fault(path, key, error) from error
        raise ConfigurationError(
            f'{key} = "{path}": there is no module {error.name}; install its package, or put its'
            " folder on PYTHONPATH"
        ) from None
    except AttributeError as error:
        if hasattr(importlib.import_module(module), name):
            raise _fault(path, key, error) from error
        raise ConfigurationError(f'{key} = "{path}": {module} has no {name}') from None
    except Exception as error:
        raise _fault(path, key, error) from error


def _fault(path: str, key: str, error: Exception) -> ConfigurationError:
    what = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    return ConfigurationError(f'{key} = "{path}" cannot be imported: {what}')
