-- Hand the groups of `lease_id` back untrained.
if is_held(key.leases, arg.lease_id) then return_lease(arg.lease_id) end
return 'ok'
