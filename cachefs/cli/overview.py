"""The text of ``cachefs --help``."""

OVERVIEW = """\
A filesystem for the KV-cache states that llama.cpp saves. States of chats that
begin alike are mostly the same bytes; cachefs stores each distinct part once,
keeps the whole inside a size you set, and gives every file back byte for byte.
The server needs no change: it saves into and restores from a directory.

\b
Quick start:
  mkdir -p ~/kv
  cachefs mount ~/kv-store ~/kv                 # the store is made if missing
  llama-server -m model.gguf --slot-save-path ~/kv/
  cachefs stats                                 # how much sharing saves
  cachefs umount ~/kv

\b
STORE is a directory that cachefs fills and bounds; MOUNTPOINT an empty
directory that shows its files while the daemon runs. When the store is full,
what was used longest ago goes first; pinned files stay (cachefs pin FILE).

\b
Recipes:
  a bound          cachefs mount --max-size 20G STORE MOUNTPOINT
  at boot          cachefs systemd STORE MOUNTPOINT      (prints unit files)
  by /etc/fstab    /var/lib/cachefs  /mnt/kv  fuse.cachefs  max_size=20G,nofail  0 0
                   (mount finds cachefs in /usr/local/bin and the like only: link it there)
  in a container   docker run --device /dev/fuse --cap-add SYS_ADMIN …
                   cachefs mount --foreground STORE MOUNTPOINT
  for other users  cachefs mount -o allow_other STORE MOUNTPOINT
  for programs     cachefs stats --json;  cachefs ls --json
  for bug reports  cachefs explain FILE    (what is recognised in it; no content)
  for certainty    cachefs check --deep    (0 sound, 1 damaged, 2 cannot run)
  for watching     cachefs ls | less;  STORE/cachefs.log is the daemon's log

Each command has its own help with examples: cachefs mount --help.

\b
Exit status: 0 done; 1 refused or failed, with one line on standard error that
says why; 2 the command line is wrong; 130 interrupted.
"""
