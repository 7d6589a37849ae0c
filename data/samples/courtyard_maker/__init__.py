"""The generator of the sample scene `courtyard`: a small ray tracer with baked light, and a COLMAP model writer."""
