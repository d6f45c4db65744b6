"""Detectors: how unlike the training images an input is; larger = more OUT."""
