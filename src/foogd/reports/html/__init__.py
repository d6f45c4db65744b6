"""The report as one HTML page that needs nothing else: no network, no library, no second file."""

from .page import html_report as html_report
