-- Hand the groups of `lease_id` back untrained.
if call('HEXISTS', key.lease, arg.lease_id) == 1 then
  return_lease(arg.lease_id, arg.counts)
  save()
end
return 'ok'
