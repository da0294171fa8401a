#!/bin/sh
# Writes the files of this folder: what each command of version 0.1.0 (commit a36bf5d) saves. Run it from an empty folder with a
# neutral name, and with the folder of a tiny checkpoint for each of gpt2, llama and t5 beside it (support/checkpoints.py).
# The files are kept as that version wrote them. Never write them anew with a later version.
set -eu
small="--d-model 8 --heads 2 --repeat 1 --view none"
cat > mine.py <<'PYTHON'
import torch


class Attention(torch.nn.Module):
    def __init__(self, d_model=12, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = torch.nn.Linear(d_model, 3 * d_model), torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.n_heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        pattern = torch.softmax(q @ k.mT * (c // self.n_heads) ** -0.5, dim=-1)
        return self.out((pattern @ v).transpose(1, 2).reshape(b, t, c))
PYTHON
printf '{"text": "the cat sat on the mat"}\n{"text": "a dog ran"}\n{"text": "the cat ran"}\n' > corpus.jsonl
printf '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the cat"}]' > chat.json
mha run "the cat sat on the mat" --causal $small --save run-causal.safetensors
mha run "the cat sat on" "a dog" --padding left $small --save run-padded.safetensors
mha run "le chat" --context "the cat sat" $small --kv-heads 1 --save run-cross.safetensors
mha run "the cat sat on the mat" --positions rope --window 2,1 --heads 4 --kv-heads 2 --d-model 16 --softcap 5 --dtype float64 \
  --repeat 1 --view none --save run-positions.safetensors
mha run "the cat sat" --dropout 0.3 --train --no-out-proj $small --save run-training.safetensors
mha run "a cat | the dog sat" --documents "|" --dtype bfloat16 $small --keep pattern,z,v --save run-documents.safetensors
mha run --random 2,5 --positions alibi $small --save run-random.safetensors
mha trace "the cat sat" --causal --d-model 8 --heads 2 --repeat 1 --save trace.safetensors
mha trace "the cat sat on the mat" --cell 1,4,2 --d-model 8 --heads 2 --save trace-cell.safetensors
mha trace mine.py:Attention --save trace-code.safetensors
mha decode "the cat sat on the mat" --d-model 8 --heads 2 --prompt-len 2 --save decode.safetensors
mha heads "the cat sat on the mat and the cat sat" --causal --d-model 8 --heads 2 --map 0 --query 3,5 --where "k < q - 1" \
  --save heads.safetensors
mha heads "the cat sat on" "a dog" --d-model 8 --heads 2 --save heads-padded.safetensors
mha effect "the cat sat on the mat" --d-model 8 --heads 2 --save effect.safetensors
mha run "the cat sat" --model gpt2 --layer 0,2 --save model.safetensors
mha run --chat chat.json --model gpt2 --layer 1 --span user --span assistant --save model-chat.safetensors
mha run "the cat" --model llama --layer 1 --generate 3 --save model-generated.safetensors
mha run "the cat" "a dog ran" --model t5 --layer decoder.1,cross.1 --save model-pair.safetensors
mha heads "the cat sat on the mat" --model gpt2 --layer 1 --map 0 --save model-heads.safetensors
mha trace "the cat" --model gpt2 --layer 1 --cell 0,1,0 --save model-cell.safetensors
mha decode "the cat sat" --model gpt2 --layer 1 --save model-decode.safetensors
mha effect "the cat sat" --model gpt2 --layer 1 --save model-effect.safetensors
mha effect "the cat sat" --model gpt2 --edges --head 1.2 --save model-edges.safetensors
mha run "the cat sat on a mat" $small --save-weights weights.safetensors
mha run "the cat sat on a mat" --positions learned --max-positions 9 --no-bias --heads 4 --kv-heads 2 --d-model 16 --d-head 3 \
  --d-v 5 --causal --window 3 --view none --repeat 1 --save-weights weights-shapes.safetensors
mha run "the cat" --dtype bfloat16 --tokenizer char --positions rope $small --save-weights weights-bfloat16.safetensors
mha scan corpus.jsonl --model gpt2 --layer 0,1 --effect --where "k < q" --out scan.mha
mha vocab "the cat sat on the mat" --save vocabulary.json
