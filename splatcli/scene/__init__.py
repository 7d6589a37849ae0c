"""Scenes: cameras, images and points, read from what people have on disk."""
