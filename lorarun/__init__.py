"""lorarun: fine-tune Llama, Qwen and Gemma with LoRA on one GPU, and read how it works."""
