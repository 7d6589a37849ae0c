"""Triangle meshes of a model: depths of its views fused into a signed distance, and the surface where that is zero."""
