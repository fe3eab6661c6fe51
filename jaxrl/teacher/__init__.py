"""A teacher behind a network address: protocol, server, clients."""
