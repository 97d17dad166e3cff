"""Virtual ranks on processes: the collectives, their plans, and agreement between processes."""
