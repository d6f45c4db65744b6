"""Flower's ClientApp: each kind of message has one function of the node as its answer."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from .node import Node, answer_evaluate, answer_hello, answer_sums, answer_survey, answer_train

app = ClientApp()


def _reply(message: Message, context: Context, answer: Callable[[Node, RecordDict], RecordDict]) -> Message:
    return Message(answer(Node.of(context.node_config), message.content), reply_to=message)


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Who is there?"""
    return _reply(message, context, lambda node, _: answer_hello(node))


@app.query("survey")
def survey(message: Message, context: Context) -> Message:
    """What the method asks before training."""
    return _reply(message, context, answer_survey)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of local training."""
    return _reply(message, context, answer_train)


@app.evaluate("sums")
def sums(message: Message, context: Context) -> Message:
    """One pass of the detectors over the training features."""
    return _reply(message, context, answer_sums)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Flags and scores of the test images."""
    return _reply(message, context, answer_evaluate)
