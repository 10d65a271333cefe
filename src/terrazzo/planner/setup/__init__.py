"""What a user chooses: a request in plain arguments, and the setup that is made of it and checked."""
