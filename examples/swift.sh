# bash examples/swift.sh, with data of your own in place of data/chats.jsonl
#
# ms-swift takes our file as a plugin; ADAPTIVE_BATCHING_SETTINGS=micro_batch_size=auto,memory_limit=40GiB sets more.
# use_logits_to_keep selects logits by their place in padded samples, so that these are padded unless it is false.
swift sft \
    --model HuggingFaceTB/SmolLM2-135M --use_hf true --dataset data/chats.jsonl --tuner_type full \
    --per_device_train_batch_size 16 --gradient_accumulation_steps 1 --learning_rate 2e-5 --use_logits_to_keep false \
    --external_plugins "$(python -m adaptive_batching.swift)" --output_dir outputs/swift
