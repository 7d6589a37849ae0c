"""Poses and exposures that are trained along: what they repair, and that they are resumed in every bit."""
