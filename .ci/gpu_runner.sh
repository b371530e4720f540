# shellcheck shell=bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The machinery of .ci/gpu, which sources it: commands with a time limit, in the background or one
# after the other, each with a log, a verdict and a line in $results/summary.txt.
#
# The caller sets $results, $logs, $seconds_in_all and $part_seconds.

status=0       # the exit status of all: 1 after a failure
declare -A verdicts=() begins=() limits=()
jobs_folder=$(mktemp -d)
trap 'end_all; rm -rf "$jobs_folder"' EXIT
trap 'exit 130' INT TERM HUP

# start NAME LIMIT COMMAND...: runs the command in the background, its output in $logs/NAME. It is
# killed with all its children at LIMIT. An interrupt, rather than a termination, comes first: it
# lets pytest report what it has found. timeout makes a process group of its own.
start() {
  local name=$1 limit=$2 left=$((seconds_in_all - 5 - SECONDS))
  shift 2
  ((limit < part_seconds)) || limit=$part_seconds
  ((limit < left)) || limit=$left
  begins[$name]=$SECONDS
  limits[$name]=$limit
  ((limit > 0)) || return 0
  {
    timeout --signal=INT --kill-after=3 "$limit" "$@" >"$logs/$name" 2>&1 &
    echo $! >"$jobs_folder/$name.group"
    local result=0
    wait $! || result=$?
    kill -KILL -- "-$!" 2>/dev/null # the processes that it has left behind
    echo "$result $SECONDS" >"$jobs_folder/$name.part"
    mv "$jobs_folder/$name.part" "$jobs_folder/$name.ended"
  } &
}

# finish NAME: waits until it has ended and reports it. A process that not even SIGKILL ends, as it
# happens in a driver, is left behind.
finish() {
  local name=$1 result=137 end=$SECONDS
  if ((limits[$name] <= 0)); then
    report "$name" "NO TIME LEFT" 0
    return
  fi
  local deadline=$((begins[$name] + limits[$name] + 8))
  until [[ -e $jobs_folder/$name.ended ]] || ((SECONDS > deadline)); do sleep 0.1; done
  if [[ -e $jobs_folder/$name.ended ]]; then
    read -r result end <"$jobs_folder/$name.ended"
  fi
  local seconds=$((end - begins[$name]))
  case $result in
    0) report "$name" ok "$seconds" ;;
    77) report "$name" "NOT RUN: $(tail -n 1 "$logs/$name")" "$seconds" ;;
    124 | 137) report "$name" "TIME LIMIT of ${limits[$name]} s" "$seconds" ;;
    *) report "$name" "FAILED with $result" "$seconds" ;;
  esac
}

# part NAME LIMIT COMMAND...: start and finish.
part() {
  start "$@"
  finish "$1"
}

# report NAME VERDICT SECONDS: writes the line, and shows the end of the log unless all is well.
report() {
  local line
  verdicts[$1]=$2
  line=$(printf '%-20s %4d s  %s' "$1" "$3" "$2")
  echo "== $line"
  echo "$line" >>"$results/summary.txt"
  case $2 in
    ok | "NOT RUN"*) ;;
    *)
      status=1
      tail -n 40 "$logs/$1" 2>/dev/null
      ;;
  esac
}

# end_all: kills whatever still runs.
end_all() {
  local file
  for file in "$jobs_folder"/*.group; do
    [[ -e $file && ! -e ${file%.group}.ended ]] && kill -KILL -- "-$(<"$file")" 2>/dev/null
  done
  return 0
}
