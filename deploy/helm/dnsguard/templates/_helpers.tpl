{{- define "dnsguard.dnsService" -}}
{{ ((.Values.config.kubernetes | default dict).dnsService) | default "kube-system/kube-dns" }}
{{- end }}

{{- define "dnsguard.control" -}}
{{ .Values.config.control | default "/run/dnsguard/control.sock" }}
{{- end }}

{{- define "dnsguard.httpPort" -}}
{{ regexFind "[0-9]+$" (hasKey .Values.config "http" | ternary .Values.config.http ":9253") }}
{{- end }}
