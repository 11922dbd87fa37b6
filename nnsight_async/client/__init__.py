"""The caller's side: the tracer, one coroutine an invoke, the stream of outputs, and the mailbox."""
