"""An index that a server has, with the methods of a `irkit.Retriever`; begin at `Client`."""

from irkit.client.index_client import Client, ClientDocuments

__all__ = ["Client", "ClientDocuments"]
