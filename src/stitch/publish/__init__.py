"""Publishing a trainer's weights as versions of a run."""

from stitch.publish.anchor import write_anchor
from stitch.publish.publisher import Publisher
from stitch.publish.retry import RetryPolicy
from stitch.publish.settings import PublisherSettings
from stitch.publish.ticket import Ticket

__all__ = ["Publisher", "PublisherSettings", "RetryPolicy", "Ticket", "write_anchor"]
