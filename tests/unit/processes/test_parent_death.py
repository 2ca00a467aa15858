"""Processes that forked this one may die at any moment, also before it could ask to follow."""

import subprocess
import sys
from textwrap import dedent


def output_of(program):
    arguments = [sys.executable, "-c", dedent(program)]
    return subprocess.run(arguments, check=True, timeout=60, stdout=subprocess.PIPE, text=True)


def test_a_process_whose_parent_is_dead_already_ends_at_once():
    # The output ends when the last process has ended.
    program = """
        import os, time
        from services.processes.child import die_with_parent

        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.01)
            os.write(1, b"orphaned ")
            die_with_parent(parent)
            os.write(1, b"alive")
    """
    assert output_of(program).stdout == "orphaned "


def test_a_process_whose_parent_lives_goes_on():
    program = """
        import os
        from services.processes.child import die_with_parent

        parent = os.getpid()
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            os.write(1, b"alive")
            os._exit(0)
        os.waitpid(child, 0)
    """
    assert output_of(program).stdout == "alive"
