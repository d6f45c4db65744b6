"""What everything shares: errors, settings as fields, types, rows, random streams, plug-ins; it imports no more."""
