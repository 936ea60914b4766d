"""Stock engines, without a plugin of ours: brought to a version by their own reload from disk.

The replica keeps a checkpoint directory for its engine (`generations`), writes each version beside
the one that the engine has loaded, and has the engine load it in a pause (`engine`), over the
routes that a released vLLM or SGLang has (`vllm`, `sglang`). The engine's answers are believed
only as far as they were proven (`checksums`, `answers`). See docs/engines.md, "Stock engines".
"""
