"""What a process sets up: signals, streams, XLA's flags, compile cache, plug-ins."""
