-- Some of `callers` wait no longer.
report(arg.callers, arg.callers.num)
return 'ok'
