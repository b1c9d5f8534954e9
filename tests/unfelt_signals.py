"""A signal that ends no call of the system, as one that comes just before the call."""

UNFELT = '''
import signal, sys, threading, time

main_thread = threading.main_thread().ident

def tell(number):
    """Send this process the signal once the main thread waits, such that the wait does not end by it."""
    at, seen = None, 0
    while seen < 50:  # until the main thread stays where it is
        time.sleep(0.001)
        frame = sys._current_frames()[main_thread]
        before, at = at, (frame.f_code, frame.f_lasti)
        seen = seen + 1 if at == before else 0
    signal.pthread_kill(threading.get_ident(), number)  # it comes in this thread

def tell_soon(number):
    threading.Thread(target=tell, args=(number,), daemon=True).start()
'''
"""The begin of a program: it defines ``tell_soon``."""
