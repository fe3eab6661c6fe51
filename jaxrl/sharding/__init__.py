"""Devices, meshes, transfers between them, and accounting of their memory."""
