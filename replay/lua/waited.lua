-- The wait of `waiter` on `side` has ended without success.
end_wait(arg.side)
save()
return 'ok'
