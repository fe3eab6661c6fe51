"""Devices, meshes, moves between them, and the account of their memory."""
