"""Structure from motion: images or a video in, cameras and sparse points out. pycolmap does the geometry."""
