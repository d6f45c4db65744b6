"""Many runs: a pool of processes, and sweeps."""
