"""A run looked at from outside, by what it has written into its folder.

look        its verdict, its tables and its page
rank_count  whether it has too many ranks or too few
"""
