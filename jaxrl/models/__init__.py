"""Decoders and encoders as functions of arrays, and their layout on a mesh."""
