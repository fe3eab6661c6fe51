"""Setup of a process: signals, streams, XLA flags, compile cache, plug-ins."""
