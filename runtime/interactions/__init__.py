"""Feature interactions: dots, factorisation machines, cross networks, CIN, products."""
