"""Training: from a scene to Gaussians, as a stream of events."""
