#!/bin/sh
# slurm-resilience @CONTEXT@: installed by `slurm-resilience hooks install`, which fills in the lines below.
# Ends with 0 whatever happens to our own part; the code of a chained script is passed on.  Trusts nothing of the job's:
# of the environment only numbers and names on the list are handed on, each checked again behind.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
context='@CONTEXT@'
python='@PYTHON@'
start='@START@'
config='@CONFIG@'
state='@STATE@'
deadline_s='@DEADLINE_S@'
chained='@CHAINED@'

# Only fixed words, numbers and a checked node name get into the record.
record() (
    umask 077
    node=${SLURMD_NODENAME-}
    case $node in '' | .* | *[!A-Za-z0-9_.-]*) node=unknown-node ;; esac
    line="{\"v\": 1, \"at\": $(date +%s), \"node\": \"$node\", \"context\": \"$context\", \"what\": \"own_error\", \"error\": \"$1\"}"
    for root in "$state" /run/slurm-resilience; do
        if mkdir -p "$root" "$root/$node" 2>/dev/null && echo "$line" 2>/dev/null >>"$root/$node/ledger.jsonl"; then
            break
        fi
    done
    command -v logger >/dev/null 2>&1 && logger -t slurm-resilience -p daemon.err -- "$line" 2>/dev/null
    return 0
)

# In a subshell: what is set in it, the umask above all, is not for a site's own script.
ours() (
    umask 077
    if [ ! -x "$python" ] || [ ! -r "$start" ]; then
        record "the interpreter or our own files are missing"
        return 0
    fi
    timeout -k 1 "$deadline_s" env -i PATH="$PATH" LC_ALL=C \
        SLURMD_NODENAME="${SLURMD_NODENAME-}" SLURM_CONF="${SLURM_CONF-}" SLURM_JOB_ID="${SLURM_JOB_ID-}" \
        SLURM_JOB_UID="${SLURM_JOB_UID-}" SLURM_JOB_NUM_NODES="${SLURM_JOB_NUM_NODES-}" \
        SLURM_JOB_EXIT_CODE="${SLURM_JOB_EXIT_CODE-}" SLURM_JOB_GPUS="${SLURM_JOB_GPUS-}" \
        SLURM_JOB_PARTITION="${SLURM_JOB_PARTITION-}" \
        "$python" -I -S "$start" "$context" "$config" "$state" </dev/null >/dev/null 2>&1
    code=$?
    [ "$code" -eq 0 ] || record "our own program ended with code $code"
    return 0
)

theirs() {
    [ -n "$chained" ] || return 0
    "$chained"
}

# A site's prolog prepares what we would look at in vain before it; its epilog cleans what we look at behind it.
if [ "$context" = prolog ] || [ "$context" = epilog ]; then
    theirs
    theirs_code=$?
    ours
else
    ours
    theirs
    theirs_code=$?
fi
exit "$theirs_code"
