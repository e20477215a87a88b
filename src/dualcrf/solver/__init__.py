"""MAP inference with a certificate: lowering the dual, decoding labels, and the proof of both."""
