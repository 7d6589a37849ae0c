"""Edits of a model after training: moving, cutting and cleaning Gaussians."""
