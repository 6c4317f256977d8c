-- Stop or resume granting slots.
S.paused = arg.paused
wake_room()
save()
return 'ok'
