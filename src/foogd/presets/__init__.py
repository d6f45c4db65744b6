"""Presets and sweeps as TOML files, and what reads them."""
