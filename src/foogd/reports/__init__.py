"""What people read of runs: pages, tables, figures, comparisons."""
