"""fedfp8"""
