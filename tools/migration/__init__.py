"""What the migration guides are made of: configurations and scripts of other stacks, and every key's fate."""
