"""The operations behind `foogd.data.corrupt`: functions of (images N×C×H×W in [0, 1], generator, constants…)."""
