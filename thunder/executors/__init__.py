"""The executors that come with thunder: one file each."""
