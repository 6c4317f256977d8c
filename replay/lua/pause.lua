-- Stop or resume granting slots.
S.paused = arg.paused
wake('room')
save()
return 'ok'
