"""Keys of other libraries (TRL, verl, OpenRLHF, tunix): what they are called here, or that they are
not here. Only errors about unknown keys read this; docs/coming-from-trl.md and
docs/coming-from-verl.md say what differs.
"""

from __future__ import annotations

THEIRS: dict[str, str] = {
    "optimizer.learning_rate": "lr learning_rate actor_learning_rate",
    "optimizer.b1": "betas beta1 adam_beta1 adam_betas",
    "optimizer.b2": "betas beta2 adam_beta2 adam_betas",
    "optimizer.eps": "adam_epsilon",
    "optimizer.clip_norm": "max_grad_norm grad_clip clip_grad max_norm",
    "optimizer.name": "optim",
    "optimizer.lr_schedule": "lr_scheduler lr_scheduler_type warmup_style",
    "optimizer.warmup_steps": "warmup_ratio lr_warmup_ratio lr_warmup_steps lr_warmup_steps_ratio",
    "optimizer.weight_decay": "l2 weight_decay",
    "steps": "max_steps total_training_steps num_train_epochs num_epochs num_episodes total_epochs",
    "actor.epochs_per_batch": "max_epochs num_iterations ppo_epochs",
    "batch_size": (
        "per_device_train_batch_size generation_batch_size train_batch_size rollout_batch_size"
    ),
    "actor.micro_batch_tokens": (
        "per_device_train_batch_size gradient_accumulation_steps ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz "
        "micro_train_batch_size micro_batch_size"
    ),
    "group_size": "generation_batch_size num_generations n_samples_per_prompt rollout.n",
    "actor.minibatches": "steps_per_generation ppo_mini_batch_size mini_batch_size",
    "reference.num_microbatches": "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
    "teacher.num_microbatches": "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
    "actor.remat": "gradient_checkpointing enable_gradient_checkpointing",
    "actor.dtype": "bf16 fp16 torch_dtype",
    "rollout.dtype": "bf16 fp16 torch_dtype",
    "offload.params": "param_offload",
    "offload.optimizer": "optimizer_offload",
    "max_prompt_tokens": "max_prompt_length prompt_max_len max_length max_seq_len max_model_len",
    "max_new_tokens": (
        "max_completion_length max_response_length max_tokens_to_generate generate_max_len "
        "response_length max_tokens sampling.max_new_tokens max_length max_seq_len "
        "max_sequence_tokens "
        "max_model_len"
    ),
    "sampling.temperature": "rollout.temperature generation_kwargs",
    "sampling.top_p": "rollout.top_p generation_kwargs",
    "sampling.top_k": "rollout.top_k",
    "sampling.stop": "stop_strings generation_kwargs",
    "rollout.slots": "max_num_seqs",
    "rollout.parallel.tensor": (
        "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size"
    ),
    "actor.parallel.fsdp": "fsdp_size",
    "actor.parallel.context": "ulysses_sequence_parallel_size context_parallel_size",
    "actor.parallel.expert": "expert_model_parallel_size",
    "mesh": "n_gpus_per_node nnodes",
    "ray.address": "nnodes",
    "policy.kl_coef": "beta kl_coef kl_loss_coef use_kl_loss",
    "distill.jsd_beta": "beta",
    "policy.reward_kl_coef": "kl_coef kl_ctrl.kl_coef init_kl_coef use_kl_in_reward",
    "policy.reward_kl_estimator": "kl_penalty",
    "policy.kl_estimator": "kl_loss_type",
    "policy.entropy_coef": "entropy_coeff entropy_loss_coef",
    "policy.clip_low": (
        "epsilon epsilon_low eps_clip cliprange clip_ratio clip_ratio_low eps_clip_low_high"
    ),
    "policy.clip_high": (
        "epsilon epsilon_high eps_clip cliprange clip_ratio clip_ratio_high eps_clip_low_high"
    ),
    "algorithm": "loss_type loss_mode adv_estimator advantage_estimator",
    "policy.aggregation": "loss_type loss_agg_mode",
    "policy.ratio": "importance_sampling_level",
    "policy.reward_combination": "multi_objective_aggregation",
    "policy.scale_by_std": "scale_rewards norm_adv_by_std_in_grpo",
    "policy.dynamic_sampling": "filter_groups filter_groups.enable dynamic_filtering",
    "policy.correction": "vllm_importance_sampling_correction rollout_is",
    "policy.correction_cap": "vllm_importance_sampling_cap rollout_is_threshold",
    "distill.on_policy_fraction": "lmbda lambda lambda_ jsd_lambda",
    "reward.functions": (
        "reward_funcs reward_fns custom_reward_function custom_reward_function.path remote_rm_url"
    ),
    "reward.weights": "reward_weights",
    "reward.model": (
        "reward_model reward_model_path reward_pretrain reward_model.model.path reward_model.enable"
    ),
    "reward.truncated": "mask_truncated_completions overlong_filtering",
    "reward.overlong_buffer": "overlong_buffer overlong_buffer.len",
    "reward.overlong_penalty": "overlong_buffer.penalty_factor",
    "student.model": (
        "model_name_or_path model_revision pretrain actor_rollout_ref.model.path model.path "
        "model_id"
    ),
    "student.lora.rank": "lora lora_rank lora_r peft use_peft peft_config peft_config.r",
    "student.lora.alpha": "lora_alpha",
    "student.lora.targets": "lora_target_modules target_modules",
    "student.router_aux_loss_coef": "router_aux_loss_coef output_router_logits aux_loss_coef",
    "student.base_dtype": "load_in_4bit load_in_8bit bnb_4bit_quant_type quantization_config",
    "teacher.model": "teacher_model_name_or_path teacher_model",
    "data.train": "train_files dataset_name dataset_config train_dataset prompt_data",
    "data.eval": "val_files eval_dataset",
    "data.chat": "apply_chat_template",
    "data.long_prompts": "filter_overlong_prompts data.truncation truncation",
    "data.prompt_key": "input_key",
    "data.answer_key": "label_key",
    "eval.every": "eval_steps test_freq",
    "checkpoint.every": "save_steps save_freq",
    "checkpoint.keep_last": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num",
    "run_dir": "output_dir default_local_dir",
    "name": "run_name experiment_name",
    "resume": "resume_from_checkpoint resume_mode",
    "logging.every": "logging_steps",
    "logging.tensorboard": "report_to logger",
    "logging.wandb": "report_to logger use_wandb",
    "logging.mlflow": "report_to logger",
    "logging.samples": "log_completions",
    "deterministic": "full_determinism",
}
"""A key -> the keys, or their last words, that do the same elsewhere. Where one of theirs is split
into several of ours, the hint names these in the order of this table."""

ALIASES: dict[str, tuple[str, ...]] = {}
for _ours, _names in THEIRS.items():
    for _name in _names.split():
        ALIASES[_name] = (*ALIASES.get(_name, ()), _ours)

_MISSING: dict[str, str] = {
    "there is no vLLM or SGLang here: the role rollout samples, placed by mesh": (
        "use_vllm vllm_mode vllm gpu_memory_utilization vllm_gpu_memory_utilization"
    ),
    "there is no DeepSpeed or Megatron here: mesh and ROLE.parallel.* place the weights": (
        "deepspeed zero_stage megatron"
    ),
    "there is no critic here: the algorithms compare the completions of a prompt": (
        "critic gamma lam gae_lambda vf_coef"
    ),
    "the kind of attention is chosen for the device, there is no key for it": "attn_implementation",
    "padding is never computed, and there is no key for it": (
        "packing padding_free use_remove_padding"
    ),
    "turns are answered by a class that environment.name names; docs/environments.md": "multi_turn",
}
"""What there is instead -> keys, or their first or last words, of what is not here."""
ABSENT = {name: why for why, names in _MISSING.items() for name in names.split()}

TREES: dict[str, str] = {
    "actor_rollout_ref": "a key of verl: docs/coming-from-verl.md has them one by one",
    "trainer": "a key of verl or TRL: docs/coming-from-verl.md has them one by one",
    "algorithm": "algorithm is one word here, as in algorithm=grpo; docs/coming-from-verl.md",
}
"""First words of keys of which most are above."""


def alias_hint(path: str, whole: bool = False) -> str:
    """`` (here it is X)`` for a key of another library; empty for any other.

    Args:
        whole: only where the whole path is known, not where its last or first words are.
    """
    words = path.split(".")
    if words[0] in ABSENT:
        return f" ({ABSENT[words[0]]})"
    ends = [path] if whole else [".".join(words[i:]) for i in range(len(words))]
    for end in ends:
        if end in ALIASES:
            return f" (here it is {' or '.join(ALIASES[end])})"
        if end in ABSENT:
            return f" ({ABSENT[end]})"
    return f" ({TREES[words[0]]})" if words[0] in TREES and not whole else ""
