"""How figures are written: amounts, lines and tables of every report."""
