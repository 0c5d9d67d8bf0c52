// Package proc reads what a process has used, from /proc (proc_pid_stat(5),
// proc_pid_status(5)).
package proc
