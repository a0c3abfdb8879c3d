"""Keyed locks of the application: one holder in the cluster for a key (decision 56).

A task passes three stages, and waits in the order of arrival in each: the line of its key in this process, a free lock
session, and the lock on the server. So a key takes one session, however many tasks of the process wait for the key.
"""
