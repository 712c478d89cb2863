"""Debian's Chromium without a window, for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs a browser: apt-get install chromium chromium-driver"

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1400,1900",
)
# No page waits for anything; a test that waits longer has found a defect.
_LONG_S = 60.0
# The error that kept the page from being shown, in a list.
_FAILURE = "const {error} = document.getElementById('loading').dataset; return error ? [error] : []"


@contextmanager
def started(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own in this folder, which does not exist yet."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (*_ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def prefer(driver: webdriver.Chrome, scheme: str) -> None:
    """Lets pages see that their reader prefers "light" or "dark"."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def opened(driver: webdriver.Chrome, page: Path) -> float:
    """Opens a page of `inspect --html`, and returns after how many seconds it was there, by its own clock."""
    driver.get_log("browser")
    driver.get(page.as_uri())
    wait: WebDriverWait[webdriver.Chrome] = WebDriverWait(driver, _LONG_S, poll_frequency=0.02)
    wait.until(lambda it: it.execute_script("return document.body.dataset.opened") or complaints(it))
    assert not complaints(driver)
    return float(driver.execute_script("return document.body.dataset.opened")) / 1000


def complaints(driver: webdriver.Chrome) -> list[str]:
    """What the page has written to the console since the last look, and why it could not be shown."""
    return [entry["message"] for entry in driver.get_log("browser")] + list(run(driver, _FAILURE))


def run(driver: webdriver.Chrome, script: str, *arguments: Any) -> Any:
    """Runs a script in the page."""
    return driver.execute_script(script, *arguments)
