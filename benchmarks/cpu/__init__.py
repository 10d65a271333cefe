"""Step time and memory of Terrazzo beside its peers on CPU ranks: `terrazzo bench --suite cpu`, which is `suite`."""
