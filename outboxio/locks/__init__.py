"""Keyed locks for your application: one holder per key in the cluster (decision 56).

A task waits for three things, first come, first served: its turn in the queue of the key in this process, a free lock
session, and the lock on the server. So a key uses one session, however many tasks of the process wait for it.
"""
